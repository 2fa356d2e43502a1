def pipeline():
    return {}["name"]
