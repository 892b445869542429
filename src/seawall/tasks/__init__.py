"""Guarded tasks for task queues: what their messages carry, and when a refused task runs again.

    seawall.tasks.celery     GuardedTask, a base class for tasks of Celery
    seawall.tasks.dramatiq   GuardedActors, a middleware for brokers of dramatiq

Each module needs its library, and raises an ImportError that names it if it is missing.
"""
