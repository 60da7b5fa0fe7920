"""Processes that clients talk to: public gRPC, tokenizing, detokenizing."""
