"""What is measured when there is a device for a few minutes; see ``__main__``."""
