"""`dflow serve`: what of a run is served, and one chat request to the server."""
