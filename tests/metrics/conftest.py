from hypothesis import settings

settings.register_profile("without deadline", deadline=None)  # the machines of tests are shared
settings.load_profile("without deadline")
