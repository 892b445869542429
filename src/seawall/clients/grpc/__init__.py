"""gRPC calls under a guard: interceptors for channels of grpcio, sync and aio."""

try:
    import grpc as _grpc  # noqa: F401 - only to report the missing package
except ImportError as error:  # pragma: no cover - installed in the tests
    raise ImportError("seawall.clients.grpc needs grpcio: pip install 'seawall[grpc]'") from error

from seawall.clients.grpc.calls import Rpc
from seawall.clients.grpc.errors import retry_on
from seawall.clients.grpc.interceptors import GuardedInterceptor, aio_interceptors

__all__ = ["GuardedInterceptor", "Rpc", "aio_interceptors", "retry_on"]
