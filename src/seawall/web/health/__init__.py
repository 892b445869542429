"""Health checks: which checks run, how often, and how probes are answered."""

from seawall.web.health.health import CheckFinding, Degraded, Health, Healthy, Unhealthy

__all__ = ["CheckFinding", "Degraded", "Health", "Healthy", "Unhealthy"]
