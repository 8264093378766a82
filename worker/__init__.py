"""The single writer. The ledger decides (messages in, arrays out; no socket, no clock, no process), the bookkeeper
publishes what it decided, and the duty cycle of the sidecar process feeds it."""
