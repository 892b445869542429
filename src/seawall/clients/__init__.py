"""The client's edge: guarded calls to other services, for common client libraries.

    seawall.clients.httpx      transports for httpx: GuardedTransport, AsyncGuardedTransport
    seawall.clients.httpx2     the same for httpx2
    seawall.clients.requests   an adapter for requests: GuardedAdapter
    seawall.clients.aiohttp    a middleware for aiohttp: GuardedMiddleware
    seawall.clients.boto3      a guard for clients of boto3: guard_client
    seawall.clients.sqlalchemy a pool for engines of SQLAlchemy: guarded_pool
    seawall.clients.upstreams  several hosts behind one name
    seawall.clients.llm        token limits, streams and fallbacks for language models
    seawall.clients.grpc       interceptors for gRPC

Each module needs its library, and raises an ImportError that names it if it is missing.
"""
