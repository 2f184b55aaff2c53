"""The messages of the rollout service: rollout.proto, and the modules that protoc generates from it."""
