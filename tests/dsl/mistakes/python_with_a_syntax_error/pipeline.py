def pipeline():
    return (
