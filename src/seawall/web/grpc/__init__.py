"""The edge of a gRPC server."""

try:
    import grpc as _grpc  # noqa: F401 - only to say what is missing
except ImportError as error:  # pragma: no cover - the tests have it
    raise ImportError("seawall.web.grpc needs grpcio: pip install 'seawall[grpc]'") from error

from seawall.web.grpc.interceptors import AioServerInterceptor, ServerInterceptor

__all__ = ["AioServerInterceptor", "ServerInterceptor"]
