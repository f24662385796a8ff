"""From answers to scores: SQuAD, Spider execution accuracy, MT-Bench."""
