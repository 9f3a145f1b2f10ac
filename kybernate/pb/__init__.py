"""Generated gRPC code of proto/: never edited, written by scripts/generate_pb.sh."""
