"""`seawall top`: the dashboard in a terminal."""
