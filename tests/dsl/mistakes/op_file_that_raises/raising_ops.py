x = 1


def f():
    return {}['key']


f()
