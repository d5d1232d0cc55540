"""On a Ray cluster: replicas of the server, and offline jobs. Needs the extra `ray`.

serve.run(deployment("model.gguf", num_replicas=4, hh=0.2))
generate(ray.data.read_json("prompts.jsonl", lines=True), "model.gguf", hh=0.2, concurrency=4)
"""

from h2o_cpp.ray.data import Continue, generate
from h2o_cpp.ray.serving import application, deployment

__all__ = ["Continue", "application", "deployment", "generate"]
