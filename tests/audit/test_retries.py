"""Retries that make an outage worse are found, good ones are not."""

from __future__ import annotations

import pytest

from tests.audit.support import assert_findings


def test_tenacity_needs_a_stop_jitter_and_errors():
    """Its defaults retry everything, at once, for ever."""
    assert_findings("""
        from tenacity import retry, retry_if_exception_type as only, stop_after_attempt
        from tenacity import stop_never, wait_exponential, wait_fixed, wait_random_exponential
        import tenacity

        @retry  #! SW201
        def one(): ...

        @retry(retry=only(OSError), wait=wait_random_exponential())  #! SW201
        def two(): ...

        @retry(retry=only(OSError), stop=stop_never, wait=wait)  #! SW201, SW203
        def three(): ...

        @retry(stop=stop_after_attempt(3), retry=only(OSError))  #! SW202
        def four(): ...

        @retry(stop=stop_after_attempt(3), wait=wait_fixed(2), retry=only(OSError))  #! SW202, SW203
        def five(): ...

        @retry(stop=stop_after_attempt(3), wait=wait_random_exponential())  #! SW204
        def six(): ...

        @retry(stop=stop, wait=make_wait(), retry=only(OSError))  #! SW203
        def seven(): ...

        @retry(**settings)
        def eight(): ...

        for attempt in tenacity.Retrying(stop=stop, wait=fixed + jitter(), retry=r):  #! SW203
            with attempt: ...
    """)


def test_backoff_and_stamina():
    """The first has no stop by default, the second has all but a budget."""
    assert_findings("""
        import backoff, stamina

        @backoff.on_exception(backoff.expo, OSError)  #! SW201
        def one(): ...

        @backoff.on_exception(backoff.expo, OSError, max_tries=3, jitter=None)  #! SW202, SW203
        def two(): ...

        @backoff.on_exception(backoff.expo, Exception, max_time=3)  #! SW203, SW204
        def three(): ...

        @backoff.on_exception(backoff.expo, Exception, max_tries=1)
        def once(): ...

        @stamina.retry(on=OSError)  #! SW203
        def four(): ...

        @stamina.retry(on=OSError, attempts=None, timeout=None)  #! SW201
        def five(): ...

        @stamina.retry(on=Exception, wait_jitter=0)  #! SW202, SW203, SW204
        def six(): ...
    """)


def test_small_libraries_and_celery():
    """Without arguments they go on for ever; Celery's fixed delay has no jitter."""
    assert_findings("""
        from retry import retry
        from retrying import retry as retrying
        from celery import shared_task

        @retry(OSError)  #! SW201, SW202
        def one(): ...

        @retry(OSError, tries=3, jitter=(0, 1))
        def two(): ...

        @retrying(stop_max_attempt_number=3)  #! SW202
        def three(): ...

        @shared_task(autoretry_for=(OSError,), max_retries=None, retry_backoff=True)  #! SW201
        def four(): ...

        @shared_task(autoretry_for=(OSError,))  #! SW202
        def five(): ...

        @shared_task(autoretry_for=(OSError,), retry_backoff=True)
        def six(): ...
    """)


def test_our_own_retry():
    """Retry wants a budget, jitter, and errors that pass by themselves."""
    assert_findings("""
        from seawall import Retry, RetryBudget
        from seawall.backoff import constant
        Retry(on=OSError)  #! SW203
        Retry(on=OSError, budget=RetryBudget())
        Retry(on=OSError, attempts=1)
        Retry(on=OSError, backoff=constant(1), budget=budget)  #! SW202
        Retry(on=Exception, budget=budget)  #! SW204
    """)


def test_urllib3_retry():
    """urllib3 has no jitter by default, and repeats POST only if it is configured to."""
    assert_findings("""
        from urllib3.util.retry import Retry
        Retry(3)
        Retry(total=3, backoff_factor=1)  #! SW202
        Retry(total=3, backoff_factor=1, backoff_jitter=1)
        Retry(total=3, allowed_methods=None)  #! SW205
        Retry(total=3, allowed_methods=["GET", "POST"])  #! SW205
        Retry(total=3, allowed_methods=["GET"])
    """)


def test_loops_that_retry():
    """A loop that ends when a try succeeds, and pauses when it fails, is a retry."""
    assert_findings("""
        import random, time
        def for_ever():
            while True:  #! SW201
                try:
                    return ask()
                except OSError:
                    time.sleep(1)  #! SW202
        def leaves():
            while True:
                try:
                    return ask()
                except OSError:
                    if tries > 3:
                        sys.exit(1)
                    time.sleep(random.random())
        def listen():
            while True:
                try:
                    return next_message()
                except OSError:
                    time.sleep(random.random())
        def bounded():
            for attempt in range(3):
                try:
                    return ask()
                except OSError:
                    if attempt == 2:
                        raise
                    time.sleep(2 ** attempt)  #! SW202
        def jittered():
            for attempt in range(3):
                try:
                    return ask()
                except OSError:
                    time.sleep(random.uniform(0, 2 ** attempt))
        def drawn():
            for attempt in range(3):
                try:
                    return ask()
                except OSError:
                    pause = random.random()
                    time.sleep(pause)
        def computed():
            for attempt in range(3):
                try:
                    return ask()
                except OSError:
                    time.sleep(backoff(attempt))
        def everything():
            for attempt in range(3):
                try:
                    return ask()
                except:  #! SW204
                    time.sleep(random.random())
        def judged():
            for attempt in range(3):
                try:
                    return ask()
                except Exception as error:
                    if not passes(error):
                        raise
                    time.sleep(random.random())
    """)


@pytest.mark.parametrize(
    "code",
    [
        "while True:\n try: poll()\n except Exception: time.sleep(5)",
        "for item in items:\n try: send(item)\n except OSError: time.sleep(1)",
        "while True:\n try:\n  ask()\n  break\n except OSError: raise",
        "while not done():\n time.sleep(1)",
        "for i in range(9):\n try:\n  ask()\n  break\n except OSError: pass\n time.sleep(0.1)",
        "for i in range(9):\n try:\n  ask()\n  break\n except OSError: time.sleep(poll_every)",
        "while True:\n try:\n  items.get_nowait()\n  break\n except Empty: time.sleep(1)",
        "for i in range(9):\n try:\n  a.rename(b)\n  break\n except FileExistsError: time.sleep(1)",
    ],
    ids=["poller", "items", "leaves", "waits", "ready", "poll", "queue", "file"],
)
def test_loops_that_do_not_retry(code: str):
    """Pollers and loops over items do their work again, but not the same."""
    assert_findings(f"import time\n{code}\n")


def test_posts_are_not_repeated_without_a_key():
    """A POST in a retry needs an idempotency key."""
    assert_findings(
        """
        import httpx, requests, stamina
        from seawall import Guard
        session = requests.Session()
        @stamina.retry(on=OSError)
        def pay():
            requests.post(url, timeout=3)  #! SW205
            requests.get(url, timeout=3)
            session.request("POST", url, timeout=3)  #! SW205
            session.request("GET", url, timeout=3)
        @stamina.retry(on=OSError)
        def keyed():
            requests.post(url, headers={"Idempotency-Key": key}, timeout=3)
        def once():
            requests.post(url, timeout=3)
        guard = Guard.standard("vendor", on=OSError, timeout=2)
        @guard
        async def ours(client: httpx.AsyncClient):
            await client.post(url)
        """,
        "SW205",
    )


def test_retries_around_retries_are_found():
    """An SDK that retries, or a function that does, inside another retry."""
    assert_findings(
        """
        import openai, boto3, stamina
        client = openai.OpenAI(timeout=30)
        single = openai.OpenAI(timeout=30, max_retries=0)
        storage = boto3.client("s3")
        @stamina.retry(on=OSError)
        def ask():
            client.chat.completions.create()  #! SW206
            client.with_options(max_retries=0).chat.completions.create()
            single.chat.completions.create()
            storage.get_object()  #! SW206
        @stamina.retry(on=OSError)
        def outer():
            ask()  #! SW206
        def plain():
            client.chat.completions.create()
            ask()
        """,
        "SW206",
    )
