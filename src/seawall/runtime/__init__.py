"""What runs the policies: gates, flows, the two runners, events, virtual time."""
