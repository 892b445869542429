"""The service in Django: settings, URLs and views in one module.

DJANGO_VIEWS in the environment says which views: "async" or "sync", for ASGI, or "wsgi".
"""

from __future__ import annotations

import os
from typing import Any

import django
from django.conf import settings
from django.core.asgi import get_asgi_application
from django.core.wsgi import get_wsgi_application
from django.http import HttpRequest, HttpResponse, JsonResponse
from django.urls import path

from tests.web.frameworks import service

settings.configure(
    ALLOWED_HOSTS=["*"],
    INSTALLED_APPS=["seawall.web.django"],
    MIDDLEWARE=["seawall.web.django.ErrorMiddleware"],
    ROOT_URLCONF=__name__,
    SECRET_KEY="not used",  # noqa: S106
    SEAWALL={name.upper(): part for name, part in service.parts().items()},
)
django.setup()

from seawall.web.django import protect  # noqa: E402 - after the settings


def hello(_request: HttpRequest) -> HttpResponse:
    return HttpResponse("hello")


def errors(_request: HttpRequest, kind: str) -> HttpResponse:
    raise service.error_of(kind)


async def aerrors(_request: HttpRequest, kind: str) -> HttpResponse:
    raise service.error_of(kind)


def slow(_request: HttpRequest) -> HttpResponse:
    return HttpResponse(service.blocking_slow())


async def aslow(_request: HttpRequest) -> HttpResponse:
    return HttpResponse(await service.slow())


def checked_slow(_request: HttpRequest) -> HttpResponse:
    return HttpResponse(service.checked_slow())


def pause(_request: HttpRequest) -> HttpResponse:
    return HttpResponse(service.blocking_pause())


async def apause(_request: HttpRequest) -> HttpResponse:
    return HttpResponse(await service.pause())


def running(_request: HttpRequest) -> HttpResponse:
    return JsonResponse(service.running())


kind = os.environ["DJANGO_VIEWS"]
views: dict[str, Any] = {
    "errors/<kind>": aerrors if kind == "async" else errors,
    "slow": {"async": aslow, "sync": slow, "wsgi": checked_slow}[kind],
    "pause": apause if kind == "async" else pause,
    "hello": hello,
    "running": running,
}
urlpatterns = [path(route, view) for route, view in views.items()]
app: Any = protect(get_wsgi_application() if kind == "wsgi" else get_asgi_application())
