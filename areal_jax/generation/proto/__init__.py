"""The rollout service as messages: rollout.proto, and what protoc makes of it."""
