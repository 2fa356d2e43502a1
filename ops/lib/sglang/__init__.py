"""SGLang in this process, for capture and the check of exports."""
