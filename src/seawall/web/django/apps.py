"""The Django app: it registers the checks of its settings, and has management commands."""

from __future__ import annotations

from django.apps import AppConfig
from django.core.checks import register

from seawall.web.django.settings import check_settings


class SeawallConfig(AppConfig):  # type: ignore[misc]  # it has no types
    """Seawall in a Django project; it has no models."""

    name = "seawall.web.django"
    label = "seawall"
    verbose_name = "Seawall"

    def ready(self) -> None:
        """Register the checks."""
        register(check_settings, "seawall")
