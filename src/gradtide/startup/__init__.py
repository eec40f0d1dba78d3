"""The start-up hook of Python, in a folder of its own: see `sitecustomize`."""
