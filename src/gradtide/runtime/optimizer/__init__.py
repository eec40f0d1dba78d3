"""What is known of the user's optimizer, and its step for some parameters or later."""
