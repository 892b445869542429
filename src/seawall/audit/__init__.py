"""The audit: what a service's source leaves unguarded, and what its guards never do.

    seawall audit src/

reads source without importing it, and `audit_process()` the guards of this process; see
`docs/operate/audit.md`. Each name is loaded when it is used.
"""

from seawall._lazy import lazily

TYPE_CHECKING = False  # as in `seawall` itself
if TYPE_CHECKING:
    from seawall.audit.engine import audit_files, audit_source
    from seawall.audit.findings import RULES, AuditRule, Finding
    from seawall.audit.process import audit_process

__all__ = ["RULES", "AuditRule", "Finding", "audit_files", "audit_process", "audit_source"]

_HOMES = {
    "audit.engine": "audit_files audit_source",
    "audit.findings": "Finding RULES AuditRule",
    "audit.process": "audit_process",
}
"""Public names by the module that defines them."""

if not TYPE_CHECKING:  # hidden from type checkers, so that they report unknown names
    __getattr__, __dir__ = lazily(__name__, _HOMES, globals())
