"""An OpenAI-compatible server over every backend: a policy schedules the requests of real clients, which are recorded as a run.

    HTTP, one event loop                            the engine, in a process of its own (`link`)
      bodies    fields of a request, checked
      app       routes, limits, key     -- requests, those who left -->  engine   iterations; writes the run's folder
      answers   text, chunks            <-- a message per iteration ---

docs/server.md says how to use it. Only this package knows of HTTP.
"""
