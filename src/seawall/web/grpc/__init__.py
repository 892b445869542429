"""The edge of a gRPC server."""

try:
    import grpc as _grpc  # noqa: F401 - only to report the missing package
except ImportError as error:  # pragma: no cover - installed in the tests
    raise ImportError("seawall.web.grpc needs grpcio: pip install 'seawall[grpc]'") from error

from seawall.web.grpc.interceptors import AioServerInterceptor, ServerInterceptor

__all__ = ["AioServerInterceptor", "ServerInterceptor"]
