"""An OpenAI-compatible server for every backend: a policy schedules the requests of real clients, and a run records them.

    HTTP, one event loop                            the engine, in a separate process (`link`)
      bodies    validates the fields of a request
      app       routes, limits, key     -- requests, cancellations -->  engine   runs iterations; writes the run's folder
      answers   text, chunks            <-- a message per iteration --

docs/server.md describes its use. Only this package knows about HTTP.
"""
