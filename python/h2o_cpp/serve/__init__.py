"""The server behind `h2o-cpp serve`, which the extra `serve` installs.

`app` builds the application. `completions` has OpenAI's endpoints, whose objects `openai_requests`
and `openai_responses` define; `messages`, `responses_api` and `ollama` are other APIs. `service`
submits requests to the Engine, `outputs` collects the results and `generation_response` sends them.
"""
