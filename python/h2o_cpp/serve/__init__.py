"""An OpenAI-compatible server of one model, which the extra `serve` installs.

`app` puts it together. `requests` and `responses` are what goes over the wire, `completions` and
`chat` the endpoints; `service` hands requests to the Engine, whose results are in `outputs`,
which `response_stream` sends.
"""
