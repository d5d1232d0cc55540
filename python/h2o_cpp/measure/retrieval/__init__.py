"""What eviction cannot do: tasks whose answer stands in the prompt, for any model."""
