"""Several hosts behind one name: choose the fastest, and avoid failing ones."""

from seawall.clients.upstreams.checks import HealthCheck
from seawall.clients.upstreams.picks import Pick
from seawall.clients.upstreams.transport import UpstreamTransport
from seawall.clients.upstreams.upstreams import Upstreams
from seawall.models.outliers import Outliers

__all__ = ["HealthCheck", "Outliers", "Pick", "UpstreamTransport", "Upstreams"]
