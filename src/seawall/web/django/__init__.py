"""Seawall in a Django project: an app, a middleware, the edge, and a database from an alias.

    INSTALLED_APPS = [..., "seawall.web.django"]
    MIDDLEWARE = ["seawall.web.django.ErrorMiddleware", ...]
    SEAWALL = {"TIMEOUT": 10.0}

    application = protect(get_asgi_application())  # in asgi.py

`manage.py check` checks the settings.
"""

try:
    import django as _django  # noqa: F401 - for a better message than its own
except ImportError as error:
    raise ImportError("seawall.web.django needs Django: pip install 'seawall[django]'") from error

from seawall.web.django.edge import ErrorMiddleware, protect

__all__ = ["ErrorMiddleware", "protect"]
