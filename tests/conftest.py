"""What holds for the tests of all rooms: a slow or busy machine makes no example of a property test too slow."""

from hypothesis import HealthCheck, settings

settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")
