"""Clients and guards made for each call, and guards without a timeout, are found."""

from __future__ import annotations

from tests.audit.support import assert_findings


def test_a_client_for_each_request_is_found():
    """A client that is made and thrown away in a handler or a loop is found."""
    assert_findings(
        """
        import httpx, requests
        app = make_app()
        @app.get("/")
        def handler():
            with requests.Session() as session:  #! SW501
                return session.get(url, timeout=3)
        async def ask():
            async with httpx.AsyncClient() as client:  #! SW501
                return await client.get(url)
        async def each(urls):
            for url in urls:
                client = httpx.AsyncClient()  #! SW501
                await client.get(url)
        """,
        "SW501",
    )


def test_a_client_without_connections_is_clean():
    """A client that calls an application in the same process has no pool to lose."""
    assert_findings(
        """
        import httpx
        from httpx import ASGITransport
        async def ask(path):
            async with httpx.AsyncClient(transport=ASGITransport(app=app)) as client:
                await client.get(path)
            local = httpx.ASGITransport(app=app)
            async with httpx.AsyncClient(transport=local, base_url="http://app") as client:
                await client.get(path)
            async with httpx.AsyncClient(transport=httpx.AsyncHTTPTransport()) as other:  #! SW501
                await other.get(path)
        """,
        "SW501",
    )


def test_a_client_that_is_kept_is_clean():
    """What is returned, stored, handed on, or made once at the start is not thrown away."""
    assert_findings(
        """
        import contextlib, httpx
        shared = httpx.AsyncClient()
        def make():
            client = httpx.AsyncClient()
            return client
        class Shop:
            async def open(self):
                self.client = httpx.AsyncClient()
        async def ask():
            global client
            client = httpx.AsyncClient()
        async def handed():
            async with httpx.AsyncClient() as client:
                await crawl(client)
        @contextlib.asynccontextmanager
        async def lifespan(app):
            async with httpx.AsyncClient() as client:
                yield {"client": client}
        async def main():
            async with httpx.AsyncClient() as client:
                await client.get(url)
        async def other_place(base):
            async with httpx.AsyncClient(base_url=base) as client:
                return await client.get("/")
        async def remembered(url):
            if url not in cache:
                async with httpx.AsyncClient() as client:
                    cache[url] = await client.get(url)
        def script():
            with httpx.Client() as client:
                client.get(url)
        """,
        "SW501",
    )


def test_a_guard_needs_a_timeout():
    """A guard whose policies are all known, and none of them a Timeout, is found."""
    assert_findings(
        """
        from seawall import Breaker, Bulkhead, Guard, Timeout
        from app import policy
        limit = Timeout(2.0)
        Guard("a", Bulkhead(3), Timeout(2.0))
        Guard("b", Bulkhead(3), Breaker())  #! SW601
        Guard("c", Bulkhead(3), limit)
        Guard("d", Bulkhead(3), policy)
        Guard("e", *policies)
        Guard.standard("f", on=OSError, timeout=2.0)
        """,
        "SW601",
    )


def test_a_guard_is_made_once():
    """A guard that is made in the function that uses it forgets everything."""
    assert_findings(
        """
        from seawall import Guard, Timeout
        def ask():
            guard = Guard("vendor", Timeout(2.0))  #! SW602
            return guard.call(fetch)
        async def at_once():
            return await Guard("vendor", Timeout(2.0)).acall(fetch)  #! SW602
        def decorating():
            guard = Guard("vendor", Timeout(2.0))  #! SW602
            @guard
            def inner(): ...
            return inner()
        def make_guard():
            return Guard("vendor", Timeout(2.0))
        top = Guard("shop", Timeout(2.0))
        def uses():
            return top.call(fetch)
        """,
        "SW602",
    )
