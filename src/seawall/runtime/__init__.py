"""The machinery that runs policies: gates, flows, the two runners, events, virtual time."""
