"""Presenters, one for each kind of thing shown: its row on the page, and its troubles."""
