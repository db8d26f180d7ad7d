"""What training gives, recorded from one version of the package and compared with another."""
