"""How long requests and operations take here, and the model that is fitted to it."""
