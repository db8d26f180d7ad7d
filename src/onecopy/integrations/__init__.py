"""Help for training frameworks; each module imports its framework, and nothing else imports these modules."""
