"""`kvp merge`: shards, which `kvp-train --heads` wrote -> the policy that one run would have."""
