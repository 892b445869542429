"""The client's edge: guarded calls to other services, by the libraries people use.

    seawall.clients.httpx      transports for httpx: GuardedTransport, AsyncGuardedTransport
    seawall.clients.httpx2     the same for httpx2
    seawall.clients.requests   an adapter for requests: GuardedAdapter
    seawall.clients.upstreams  several hosts behind one name
    seawall.clients.llm        token limits, streams and fallbacks for the vendors of models
    seawall.clients.grpc       interceptors for gRPC

Each module needs its library, and says so if that is not there.
"""
