"""What black-box harnesses talk to, and messages as token ids."""
