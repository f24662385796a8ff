"""What is generated: sequences, hypotheses, forests, requests, events. No model."""
