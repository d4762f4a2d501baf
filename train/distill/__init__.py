"""`kvp distill`: a policy fine-tuned until evicted caches answer as full ones do."""
