"""Settings of a Django project whose database is the file that SHOP_DATABASE names."""

from __future__ import annotations

import os

ALLOWED_HOSTS = ["*"]
DATABASES = {
    "default": {"ENGINE": "django.db.backends.sqlite3", "NAME": os.environ["SHOP_DATABASE"]}
}
INSTALLED_APPS = ["seawall.web.django"]
MIDDLEWARE = ["seawall.web.django.ErrorMiddleware"]
SEAWALL = {"TIMEOUT": 10.0}
SECRET_KEY = "not used"  # noqa: S105
USE_TZ = True
