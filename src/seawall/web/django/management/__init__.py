"""Management commands of the app: Django finds them in `commands`."""
