"""Health checks: what is asked, how often, and what the probes are told."""

from seawall.web.health.health import Degraded, Finding, Health, Healthy, Unhealthy

__all__ = ["Degraded", "Finding", "Health", "Healthy", "Unhealthy"]
