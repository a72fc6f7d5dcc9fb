from hypothesis import settings

# A slow machine is no failure; with CI set, hypothesis takes the same examples every time by itself.
settings.register_profile("jitckpt", settings(), deadline=None)
settings.load_profile("jitckpt")
