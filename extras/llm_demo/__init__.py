"""The demo with a pretrained model of 135M on GSM8K: `make demo-llm`, docs/real_model.md."""
