"""The wire: .proto files and what protoc makes of them (`python -m protos.generate`)."""
