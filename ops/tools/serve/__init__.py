"""`dflow serve`: prompts of a run, SGLang's arguments, and one chat request to the server."""
