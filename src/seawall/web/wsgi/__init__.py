"""The edge of a service under WSGI: the same parts as in `seawall.web`, for threads.

`Edge(app)` wraps any WSGI app; `seawall.web.flask.protect(app)` puts it around a Flask app.
"""

from seawall.web.wsgi.edge import Edge
from seawall.web.wsgi.queue_admission import QueueAdmission

__all__ = ["Edge", "QueueAdmission"]
