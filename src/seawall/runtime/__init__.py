"""The machinery that runs policies: gates, flows, the interpreter, the driver, virtual time."""
