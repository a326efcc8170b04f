"""What `mpidp tune` does: measure (measure.py), and turn the times into a table (choice.py)."""
